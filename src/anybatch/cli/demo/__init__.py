"""`anybatch demo`: a whole training set as one mini-batch, under a memory cap that it does not fit."""
