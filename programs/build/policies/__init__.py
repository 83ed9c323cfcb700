"""Several policies in one game: who plays which seats, their parts, and earlier versions of
them."""
