"""Federated learning: methods, models, data and the rounds that join them."""
