"""What is said and heard on the local network by multicast DNS: which runs there are, and where their coordinators listen."""
