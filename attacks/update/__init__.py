"""What an update says by itself: by which training it was made, in what unit, how far rounding goes."""
