"""The papers' own tables, repeated on another pair of models, with the papers' numbers beside ours"""
