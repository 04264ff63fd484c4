"""What needs one card, or says what a card is given to compute."""
