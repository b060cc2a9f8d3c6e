"""Files of weights: found, told apart, checked, read and converted."""
