"""Where the KV of evicted prefixes goes, and comes back from: host memory, then disk."""
