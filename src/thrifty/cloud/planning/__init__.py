"""Plans of fleets: which machines to rent."""
