"""Stores in object storage (S3, Google Cloud Storage, Azure), through the package obstore."""
