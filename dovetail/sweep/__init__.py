"""What if the hardware were different: a model compiled and run for every point of a grid of sizes."""
