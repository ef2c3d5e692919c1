"""The network: addresses, ways in, channels to peers, links and how fast they are."""
