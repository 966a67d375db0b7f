"""What several backends share: routing, quantisation, combine, activations, launch order."""
