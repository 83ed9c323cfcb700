"""What the nodes of a program do, one file each; `programs.launchpad_node` makes nodes of them."""
