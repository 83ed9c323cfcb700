"""EnvPool: environments in C++."""
