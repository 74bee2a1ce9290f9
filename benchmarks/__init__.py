"""Side-by-side measurements. Each prints what it ran on and what it counts, and writes the same as JSON."""
