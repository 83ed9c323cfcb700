"""What the nodes of a program do that trains several policies."""
