"""Tasks on checkpoints: generated examples, their scores, and what is kept of them."""
