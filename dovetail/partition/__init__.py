"""Partition: which part of the network runs where, and why."""

from dovetail.partition.regions import Region, explain_mismatch, partition, rivals

__all__ = ["Region", "explain_mismatch", "partition", "rivals"]
