"""What a bundle of compiled programs is worth: what it holds, and how soon a first call is done."""
