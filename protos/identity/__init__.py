"""Who somebody is: keys, certificates, invitations, and what proves them."""
