"""Text from language models: tokenizers, and tokens chosen from what a build computes."""
