"""What thousands of clients, updates and cells cost, and a network of 1e8 parameters: measured parts, and a plan."""
