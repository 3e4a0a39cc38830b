"""What the page says around its tables and its figure."""

from __future__ import annotations

from experiments.studies.toy.points import (
    CALIBRATION,
    CALIBRATION_REACH,
    INPUTS,
    NOISE,
    TEST,
    TEST_REACH,
)

OPENING = (
    f"""\
Seven points of y = cos²x with Gaussian noise of {NOISE}, at
x = {", ".join(map(str, INPUTS))} (paper, Sec. 4.1, Fig. 1), fitted by a cubic (least
squares), by a linear combination of two Gaussians (prefactor, mean and variance of each, L-BFGS)
and by a net with two hidden layers of 32 and SiLU. Every error bar is the root of α² gᵀH⁻¹g: g the
derivatives of the prediction by the parameters, H the Gauss-Newton Hessian of the loss. The net
has two of them, one from the weights of its last layer alone and one from all its weights. Shaded
are standard deviations; the published figure shades a constant times the *variance*.""",
    f"""\
**Calibration.** Seven points cannot spare any, and a net that passes through all of them has no
residuals to learn from. So the scale α is the likeliest one on {CALIBRATION} further noisy points,
evenly spaced in |x| ≤ {CALIBRATION_REACH}, for all models alike. They are new to every fit, and
eight of them lie outside the range of the seven: points inside it alone would say nothing about the
growth of the error bars outside. The ridge is the one of the loss that was minimised: none for the
cubic; for the Gaussians, whose six parameters seven points hardly determine (the smallest
eigenvalue of H is some 10⁻⁷ of the largest), that of a prior of width one about their start,
which at this noise is {NOISE}² and which the fit has too. The net was trained without a
regulariser; its ridge is calibrated with the scale.""",
    f"""\
**Scores.** {TEST} new noisy points in |x| ≤ {TEST_REACH}; *inside* means between the outermost of
the seven.""",
)

CLOSING = (
    """\
**What to expect.** The calibrated bars of the Gaussians and of the net hold about 90 % inside and
outside. A constant bar is too wide inside and holds 50 to 70 % outside, at an NLL that is four
units worse for the cubic and the net. The Gaussians can follow the function: their calibrated scale
is near the noise, as it should be for a model that is right, and inside they gain nothing over a
constant bar. The cubic cannot follow it. Its scale is half as large again as the noise, to cover
the missing fourth power inside, and outside its bars still hold less than they promise: no variance
of the parameters knows of a bias.""",
    """\
Without the further points, the residuals of the seven give a scale from three degrees of freedom
or fewer. It scatters so much between draws that the Gaussian intervals hold too little (those of a
Student-t law would be wider), and it knows nothing of a bias beyond the points. The last layer
alone and all weights give the net nearly the same bars.""",
)
