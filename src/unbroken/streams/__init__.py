"""The frozen descriptions of a text stream. Only what ``open`` returns moves."""
