"""What the kernel registry is asked by hand: lists, checks and measurements of its candidates."""
