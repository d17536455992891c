"""The short causal convolution of a state layer, whose state is each request's last inputs."""
