"""Games of several seats: policies of several runs against one another, and a person in a seat."""
