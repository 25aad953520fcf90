"""The stages from the integer graph to a placed program: partition, assignment, layout, plan."""
