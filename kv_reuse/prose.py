"""What stands before chunks while they are computed: documents of any kinds, which nobody asks about.

A chunk behind them is computed in the midst of texts, as it will stand in a prompt, and not at a beginning. They were
written for this, and what they tell is made up. Stored chunks are known by their tokens: with another letter here, what
was computed before is found no more.
"""

DOCUMENTS = (
    """\
Minutes of the monthly meeting, room 214, begun at 9:30. Present: Ms Okafor (chair), Mr Lindqvist, Dr Ramos and two \
guests from the supplier. The chair reported that the new pumps had been delivered on 12 March, nine days late, and \
that three of the forty valves were found to be faulty. Mr Lindqvist explained the test in detail: each valve is held \
at 16 bar for ten minutes, then opened and closed a hundred times. He proposed to return the whole lot. Dr Ramos \
thought that this would cost more than it saves, since the plant must be running again before the end of the quarter. \
It was agreed to replace the three valves only, and to check the others again in June.

""",
    """\
Marrow Head Lighthouse
The lighthouse at Marrow Head was built between 1861 and 1864 from grey granite that was cut on the island itself. It \
stands 38 metres above the sea and was lit by oil until 1922, when the lamp was changed to electricity. Four families \
lived in the low houses around the yard; their children were taken to school by boat, whenever the weather allowed \
it. The last keeper, Edwin Farrow, left in 1987, two years after the light had become automatic. Since then a society \
of volunteers has looked after the buildings. It opens the tower to visitors on Sundays from May to September, and \
keeps a small museum in which the first lens and the logbooks can be seen.
""",
    """\
Replacing the filter. Switch the machine off and pull out the plug. Wait at least twenty minutes, because the housing \
becomes hot during use. Turn the grey cover to the left until the two arrows meet, then lift it. Take out the old \
filter and wipe the seat with a dry cloth; do not use soap. Put in the new one with its white side up. If the cover \
does not close, the filter has been put in the wrong way round. When the red lamp blinks three times, hold the button \
for five seconds to set the counter back. A filter lasts for about 300 hours, or for six months.
""",
    """\
Dear Mrs Whitcombe, thank you for your letter of 3 November, and for the photographs of the garden. We were sorry to \
hear about the old pear tree; my father used to say that it had been planted by his own grandmother in the year of \
the great flood. Tomas has found work at the harbour and seems to be happy there. The roof is finished at last, but \
it cost nearly twice as much as the carpenter had told us in spring. We hope to visit you after Easter, if the roads \
are clear. Please give our love to Ines and to the little ones. Yours, Harriet and Paul
""",
    """\
COUNCIL VOTES FOR A SECOND BRIDGE. After a debate of six hours the council of Ostermark decided on Tuesday evening, \
by 21 votes to 14, to build a second bridge across the river Lenne. Works are to begin in 2027 and to take three \
years. The mayor, Judith Vance, called it "the most important decision in a generation". Shopkeepers of the old town \
fear that traffic, and with it their customers, will pass them by. Opponents pointed to the price of 84 million, a \
third of which is still to be found, and to the meadows on the southern bank, where storks have nested again since \
2015. A citizens' group announced that it would collect signatures against the plan.
""",
    """\
Q: How long can I return what I have ordered?
A: Within 30 days of delivery, unused and in its box. Food, and what was made to measure, cannot be returned.
Q: Who pays for the parcel?
A: You do, unless the article was damaged or was not the one that you ordered. Then write to us before you send it, \
and we shall send you a label.
Q: When do I get my money back?
A: As a rule within five working days after the parcel has reached us, in the way in which you paid.
""",
    """\
Bacteria that live without light. In the flooded galleries of the Hollin mine, 900 metres under the ground, Petrova \
and Adeyemi (2011) found communities of bacteria that obtain their energy from hydrogen alone. The gas is set free \
when water meets rocks that are rich in iron. Cells divide very slowly there: from the uptake of marked carbon the \
authors estimate that a generation takes between 40 and 120 years. Samples from three other mines in the same region \
did not contain them, although temperature, pressure and salt were nearly the same. A later study explains this by \
the age of the water, which has been cut off from the surface for at least two million years at Hollin, but for less \
than ten thousand years elsewhere. Whether these communities came with the water or wandered in through cracks is not \
known.
""",
    """\
Onion soup for four. 800 g of onions, 60 g of butter, 2 spoons of flour, 1.5 litres of stock, a glass of white wine, \
bread, 150 g of hard cheese. Slice the onions thinly and let them brown in the butter over a low flame for forty \
minutes, stirring often. Dust them with flour, add the wine, then the hot stock, and simmer for half an hour. Season \
with salt, pepper and a bay leaf. Toast the bread, lay it on the soup, cover it with cheese, and bake it until \
golden.
""",
)
