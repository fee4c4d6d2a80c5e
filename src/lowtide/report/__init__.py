"""Plans for people: text now, other forms later. No torch."""
