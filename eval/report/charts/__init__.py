"""The charts of a report: what they show, how they are drawn with matplotlib, and the files they become."""
