"""What MRV1 and MRV2 both need: graphs, rows of logits, top-k and top-p, and reasons of their patches."""
