"""Attention: softmax, linear, or a convolution instead."""
