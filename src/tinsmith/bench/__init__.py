"""What `tinsmith bench` runs: each case beside a floor of the same shape without the product, interleaved, on one machine."""
