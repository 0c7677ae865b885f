"""What every operation stands on: choosing an implementation, scratch memory, argument checks."""
