"""Labels of the images behind an update."""
