"""The bytes of adapters: how tensors lie in slots, and the programs that write them. It has no locks and no names."""
