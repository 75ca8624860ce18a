"""Models as people have them and updates as frameworks write them: each is attacked, or refused with a true reason."""
