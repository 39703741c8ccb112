"""Device to host memory: buffers that survive the process, copies, and the optimizer's fence."""
