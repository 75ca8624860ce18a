"""What a network computes, however its forward is written."""
