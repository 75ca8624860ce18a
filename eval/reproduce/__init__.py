"""The papers' tables and figures: which config redoes each, at which scale, what of it is measured, and how close."""
