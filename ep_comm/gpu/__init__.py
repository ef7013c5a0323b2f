"""What moves rows between GPUs: transports over CUDA IPC and NVSHMEM, an exchange in kernels."""
