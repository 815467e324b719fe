"""Kills any loader at random places, resumes it, and says what was lost, repeated, reordered or altered."""
