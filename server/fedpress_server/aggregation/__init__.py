"""From bodies to the next model: what a round's terms decode, add up and apply."""
