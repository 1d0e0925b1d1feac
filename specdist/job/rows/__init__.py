"""From a row of the input to requests, and from completions to the columns of a row."""
