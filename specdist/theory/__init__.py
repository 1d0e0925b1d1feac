"""What the papers' formulas predict, and the choice of each round."""
