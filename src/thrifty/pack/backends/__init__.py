"""The ways to train K trials on one device, and the choice among them."""
