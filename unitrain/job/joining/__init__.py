"""How a rank joins the job: handshake, authentication, checks."""
