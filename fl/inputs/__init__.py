"""What a network takes: pictures, series, tables, ids, or several of them."""
