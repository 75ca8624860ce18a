"""What an update says by itself: of which training, in what unit, how far rounding goes."""
