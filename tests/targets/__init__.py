"""What the contract suite needs to know of each target: one module for each kind."""
