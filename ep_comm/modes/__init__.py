"""The two ways to dispatch and combine: low latency for decode, throughput for prefill."""
