"""`dovetail agent`: lends boards of this computer to others on the network."""
