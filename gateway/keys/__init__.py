"""Who may ask, and for how much: keys are checked and limits taken before a request's body is read."""
