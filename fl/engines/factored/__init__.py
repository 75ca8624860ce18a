"""The engine that trains clients whose weights share factors."""
